"""Other frameworks run models with this package: one folder for each, imported on request only."""
