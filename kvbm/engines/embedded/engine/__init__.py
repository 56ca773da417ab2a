"""The reference engine: model, scheduler, KV pool and attention."""
