"""From a backend choice to launches: routes by M, plans, builds ahead of time, torch operators."""
