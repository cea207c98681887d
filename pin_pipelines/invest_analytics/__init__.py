"""The invest-analytics context: the starting price of every property object, for the growth chart."""
