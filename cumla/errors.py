# SPDX-License-Identifier: Apache-2.0
"""The errors that are neither a wrong type nor a wrong value.

A mistake in an argument is a `TypeError` or a `ValueError`, as everywhere in Python. What the
machine or the installation cannot do is a `CumlaError`.
"""

from __future__ import annotations

from typing import Any


class CumlaError(Exception):
    """Base class of the errors that cumla raises for reasons other than a wrong argument."""


class UnsupportedDeviceError(CumlaError):
    """The GPU cannot run the kernels: the message names what was found and what is needed."""


class CompilationError(CumlaError):
    """A kernel did not compile, or compiled into code that breaks its resource budget.

    Parameters
    ----------
    message : str
        What failed, and for which kernel.
    log : str, optional
        The compiler's log, with numbered source lines around the errors. It is appended to the
        message, so that a traceback shows it.

    Attributes
    ----------
    log : str
        The compiler's log.
    """

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(f"{message}\n{log}" if log else message)
        self._message = message
        self.log = log

    def __reduce__(self) -> tuple[Any, ...]:  # by default a copy is made of the whole text
        return type(self), (self._message, self.log), self.__dict__


class NotPreparedError(CumlaError):
    """A stream is being captured, and the call needs what capture forbids.

    Either a kernel is not loaded yet (call `cumla.prepare` before the capture), or memory would
    have to be allocated by an allocator that does not serve captures.
    """


_INSTALL = (
    "install the extra of your CUDA major version, one of the two: "
    'pip install "cumla[cu12]", or pip install "cumla[cu13]"; in a clone, or where cumla is not '
    'installed, in its folder: pip install ".[cu12]", or pip install ".[cu13]"'
)


class MissingDependencyError(CumlaError, ImportError):
    """A package that the GPU path imports is missing, or is installed twice.

    Parameters
    ----------
    problem, install : str
        The fault, without a full stop, and the remedy: by default the commands for a GPU.
    """

    def __init__(self, problem: str, install: str = _INSTALL) -> None:
        super().__init__(f"{problem}; {install}")
        self._said = problem, install

    def __reduce__(self) -> tuple[Any, ...]:  # by default a copy is made of the whole text
        return type(self), self._said, self.__dict__
