"""The routes: one module for each interface, with handlers of (exchange, services)."""
