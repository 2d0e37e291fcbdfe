"""`python -m hopline` is the command `hopline`, for launchers of Python modules such as torchrun."""

from hopline.cli import main

if __name__ == "__main__":
    main()
