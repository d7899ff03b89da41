"""Tensors of a CPU without torch: numpy's arrays with the names of torch's methods.

Importing torch takes 1.1 to 1.8 s and 110 MiB. An engine on a CPU computes in native kernels and
needs little else: views of memory, types, and some arithmetic when weights are read.

*Two modes.* As long as nothing in the process has imported torch, tensors are
:class:`~sdk.kernels.host.tensor.HostTensor`. Once torch is imported, by us or by the host program,
new tensors are torch's, and host tensors that exist already work with them: functions of torch
take them (``__torch_function__``), over the same memory. The mode of a thread does not change
within a step (:func:`~sdk.kernels.host.torch_import.one_mode`).

*Nothing is missing.* What host tensors lack imports torch and works on the same memory. That costs
a second, once: ``tests/structure/test_without_torch.py`` runs every kind of model in a process
that cannot import torch. It also compares the arithmetic with torch's, type by type.

*The rule.* Code that a CPU engine runs imports ``from sdk.kernels.lazy_torch import Tensor, torch``
and keeps nothing of torch in constants, defaults or decorators: they would be evaluated at import,
before it is known which mode is used. Tables are keyed by names of types (``type_name``).

Files: ``torch_import`` (whether torch is there, and its import), ``dtypes``, ``conversions``
between types, ``views`` and ``arithmetic`` (what a tensor does without and with its numbers),
``tensor``, ``functions`` (``empty``, ``cat``, ...), ``torch_views`` (recording, with torch).
"""
