"""The decisions: pure functions of frozen views. Policies write numbers, mechanism obeys numbers."""
