"""`spotwarp run`: a workspace around one command.

    wish         what was asked for                 saying       lines on standard error
    forms        the port to a served workspace, and which form it is to be
    daemon_form  what all forms have in common          fuse_form    the FUSE form
    patience     wait until the last writer's lease has ended
    command      what is started: program, directory, environment     recording   provenance, into the workspace
    signals      everything that happens arrives in one pipe          terminal    whose the terminal is
    child        the command as a process group                       outside     writes that nothing saves
    supervising  the loop: forward, stop, restart                     ending      publish what is left, exit code
    running      all of it in order

Invariant: whatever ends `run`, nothing that it mounted stays mounted, and the exit code is the command's own unless the
command's work was not saved.
"""
