"""The demo: one GRPO actor update of a language model, dense and with a shared prefix.

``python -m dormouse.demo run`` runs and compares both; ``python -m dormouse.demo record`` records
the rollouts. ``docs/demo.md`` defines each number.
"""
