"""Report the metrics of other people's trainers, without a line of the user's code.

Transformers (and TRL), Lightning, Accelerate and TensorBoard are changed after their import, where
they have a place for it. Their metrics, steps and progress then go where those of
:func:`nbddp.log` and :func:`nbddp.track` go.
"""
