"""The settings in effect, each with its source."""

from __future__ import annotations

import ctypes

from . import _native as native

# By the number of DORMOUSE_FROM_*.
_SOURCES = ("built in", "file", "environment", "options", "automatic")
_PARAMS_MAX = 1024


def params() -> dict[str, dict[str, str]]:
    """Returns the library's settings by their names (docs/params.md).

    Each has ``value`` in the syntax of a configuration file, ``source`` (``built in``, ``file``,
    ``environment``, ``options`` or ``automatic``), ``reason``, ``kind``, ``built_in``, ``accepts``
    and ``help``. An automatic value is that of the runtime created last, as it was revised since,
    or of one that would be created now; its ``reason`` says why.

    Any-thread. Raises :class:`ArgumentError` if a value of the environment or the file is not
    accepted.
    """
    result = {}
    for index in range(_PARAMS_MAX):
        param = native.Param()
        if native.call("param_get", index, ctypes.byref(param)) == native.END:
            break
        source = param.provenance
        result[param.name.decode()] = {
            "value": param.text("value"),
            "source": _SOURCES[source] if 0 <= source < len(_SOURCES) else "unknown",
            "reason": param.text("reason"),
            **{
                name: getattr(param, name).decode()
                for name in ("kind", "built_in", "accepts", "help")
            },
        }
    return result
