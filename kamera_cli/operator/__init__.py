"""The operator: KV(B|A) = R(δ) · (KV(B|∅) + U Vᵀ) (paper, "The operator"); form, apply, assemble, plan."""
