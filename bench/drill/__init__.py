"""A fire drill: a daemon of one's own is made to fail, and is watched noticing it and mending."""
