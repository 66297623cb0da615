"""The shapes of answers: what each endpoint makes of the same completions."""
