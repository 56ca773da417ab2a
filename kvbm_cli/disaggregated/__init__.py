"""Disaggregated prefill: engines that prefill, engines that decode, and the proxy in front of them."""
