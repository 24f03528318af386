"""What a request asks of the forward pass: interventions, captures, and the prefix-cache salt."""
