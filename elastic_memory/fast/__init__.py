"""The same numbers sooner: nothing here changes what is computed."""
