"""Child processes: started on a lifeline, copied, measured, and explained when they die."""
