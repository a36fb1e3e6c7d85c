"""What Tiffin is to reach, in figures that can say no; one file for each kind of goal."""
