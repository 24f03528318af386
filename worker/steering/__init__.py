"""The steering core: interventions and captures on plain tensors, addressed by absolute position.

Knows torch and numpy, nothing of vLLM. One step goes

    rows of the batch -> plan (host, vectorised) -> one operation a layer: steer, then capture

and nothing in here raises into the forward pass: what fails is flagged for its request alone.
"""
