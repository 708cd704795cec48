"""Importing this module calls :func:`dormouse.verl.register` with its defaults: for verl's
``external_lib``, which is imported in every worker before its engine is created."""

from . import register

register()
