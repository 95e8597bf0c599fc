"""The examples' gradients of one parameter, in each of the forms that layers give them."""
