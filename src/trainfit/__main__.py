"""`python -m trainfit` is the same as `trainfit`."""

from trainfit.cli.main import main

main()
