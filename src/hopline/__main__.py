"""`python -m hopline`: the same command, for torchrun and the like."""

from hopline.cli import main

if __name__ == "__main__":
    main()
