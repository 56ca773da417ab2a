"""Where blocks are kept below the device: host memory, disk, and stores that engines share."""
