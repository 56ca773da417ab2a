"""Workloads: the schema of their files, their `Script` (content), and the `Plan` (content, answers, launch times)."""
