"""The main job: one GRPO actor update of a real language model, the dense way and through dormouse.

``python -m dormouse.demo run`` does it and compares; ``python -m dormouse.demo record`` makes the
rollouts it runs on. ``docs/demo.md`` says what each number means.
"""
