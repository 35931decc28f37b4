"""Episodes of a workflow against an engine, and the events that they leave."""
