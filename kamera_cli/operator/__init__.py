"""The operator: KV(B|A) = R(δ) · (KV(B|∅) + U Vᵀ) (arXiv 2606.23581, "The operator"); form, apply, assemble, plan."""
