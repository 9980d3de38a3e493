{
  // Open the view of layer `number`; its section is shown already. `channel` and `image` may be null.
  hookscope.openLayer = (number, { channel, image }) => {};
}
