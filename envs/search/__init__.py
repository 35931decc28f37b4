"""The Search workflow: its prompts, parsing and scoring, its retrievers and the factbook tasks."""
