"""Form, measure and store patches: exact, orbit, pairs, removal."""
