"""`python -m kvferry` is the command line."""

from kvferry.deploy.cli import main

main()
