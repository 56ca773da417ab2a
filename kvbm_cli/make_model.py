"""`python -m kvbm_cli.make_model`: the name of the command that makes models, which are in `kvbm/engines`."""

from kvbm.engines.make_model import main

if __name__ == "__main__":
    main()
