"""From a workload to the requests of a run: `Script` (content), then `Plan` (content, answers and launch times)."""
