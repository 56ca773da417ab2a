"""Records of requests and runs, and the directory that has them."""
