"""From arrays to a launch: the only package that talks to the driver."""
