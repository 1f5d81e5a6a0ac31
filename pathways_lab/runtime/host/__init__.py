"""The device process: messages in, launches on device queues, messages out."""
