"""All decisions about blocks: which are matched, offloaded, onboarded, written to disk and evicted."""
