"""Ways to read and write the arena: system calls in threads, Linux asynchronous I/O, and NIXL."""
