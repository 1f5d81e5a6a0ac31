"""The timeline: plain records, a bounded log, and questions over them."""
