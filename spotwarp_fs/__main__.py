"""Run the command line as `python -m spotwarp_fs`."""

from spotwarp_fs.cli.main import main

if __name__ == "__main__":
    main()
