"""Math: solvers, a verifier, an aggregator and a router on problems with a boxed answer."""
