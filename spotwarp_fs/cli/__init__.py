"""Commands and settings: the only place where objects are wired and the environment is read."""
