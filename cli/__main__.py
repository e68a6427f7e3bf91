"""`python -m octavo.cli`: the command `octavo`, where its script is not on the path."""

from octavo.cli.main import run

if __name__ == "__main__":
    run()
