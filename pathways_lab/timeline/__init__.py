"""What happened: plain records, a bounded log, and questions over them."""
