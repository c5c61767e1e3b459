"""`python -m stageprune` is the command `stageprune`."""

from stageprune.cli import main

if __name__ == "__main__":
    main()
