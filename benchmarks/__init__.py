"""Measurements beside other learners on the same work, and of single parts."""
