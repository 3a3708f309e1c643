"""`python -m moe_runtime` is the `moe-runtime` command."""

from moe_runtime.cli import main

if __name__ == "__main__":
    main()
