"""The commands of the command line, a module each; `fagen.cli.app` lists them."""
