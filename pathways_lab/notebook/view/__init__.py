"""Live views: messages to the browser, and the frozen picture that stays."""
