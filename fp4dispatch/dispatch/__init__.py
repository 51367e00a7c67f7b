"""The policy met with this machine: choices, explanations, what-if questions, tuned times."""
