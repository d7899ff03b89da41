"""Simulates replicas on a virtual clock: real schedulers and the real router, measured step costs.

``cluster.py`` runs the events. Only the model is left out: ``executor.py`` has steps take as long
as ``costs.py`` says, and answers with the tokens that the workload wants.
"""
