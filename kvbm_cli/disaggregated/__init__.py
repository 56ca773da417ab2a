"""Disaggregated serving: prefill engines, decode engines, and the proxy in front of them."""
