"""Forms in which other engines and trainers write routed experts; conversion happens at this edge."""
